"""Keys and values in pages: their format, their slots, and the launches that write them."""
