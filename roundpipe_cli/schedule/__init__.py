"""Who does what when: schedules as data, their lowering and their simulation. No torch."""
