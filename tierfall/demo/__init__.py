"""The demo: a real training that is killed during a flush, restores, and continues with identical losses."""
