"""The pictures of the reports."""
