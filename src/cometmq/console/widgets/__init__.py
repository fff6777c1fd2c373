"""Elements of pages: the view, lists, forms, charts, actions."""
