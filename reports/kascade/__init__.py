"""Kascade's tables, its sections of a page, and the figures of its guides."""
