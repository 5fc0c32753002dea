"""What `scripts/gpu_check` does: `procedure` starts `part` in child processes; each other module is one part."""
