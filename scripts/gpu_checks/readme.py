"""placeholder"""
def main(p): return 0
