"""Access control: accounts, their permissions, and the check of each request (docs/security.md, Access)."""
