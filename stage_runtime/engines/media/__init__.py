"""Pictures, sound and videos of a request, decoded where its model runs, and fetched only from an allow-list."""
