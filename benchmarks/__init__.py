"""Side-by-side measurements of our broker and Apache's: ``python -m benchmarks --help``."""
