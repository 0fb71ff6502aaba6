"""What `polylens bench` measures: one question a function, every answer one JSON line."""
