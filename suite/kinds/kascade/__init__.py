"""The proof of Kascade: rows that choose keys in different ways at the same kept fraction, and what they cost."""
