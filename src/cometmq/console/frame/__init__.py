"""What pages are made of: lists, forms, live values, actions."""
