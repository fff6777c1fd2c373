"""The name server: route tables (a core without I/O), their requests, and the process part around them."""
