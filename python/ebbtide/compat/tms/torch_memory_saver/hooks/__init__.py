"""How a program gets its memory saved. ebbtide needs no choice: regions work with the preload library and without."""
