"""Predictions held against measurements: rows, comparison and the report."""
