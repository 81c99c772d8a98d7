"""`cdeq demo`: a small teacher on embedded data, its students, everything compared."""
