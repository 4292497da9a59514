"""Render what the laboratory measured as tables and charts."""
