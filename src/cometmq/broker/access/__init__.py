"""Access control: accounts, their rights, and the check of each request (docs/security.md, Access)."""
