"""Kascade's evidence: rows that choose keys in different ways at the same kept fraction, and what each row costs."""
