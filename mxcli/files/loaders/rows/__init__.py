"""The loader rules of each family of layouts, as rows."""
