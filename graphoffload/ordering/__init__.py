"""Ordering, pure: events, and the checker that judges them by happens-before."""
