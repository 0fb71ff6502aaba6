"""polylens' core inside other people's engines. Leaves: nothing of polylens imports them."""
