"""The elements of which pages consist: the view, lists, forms, charts, actions."""
