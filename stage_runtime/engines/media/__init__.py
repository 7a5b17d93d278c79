"""Pictures, sound and videos of a request, decoded where its model runs. Nothing is fetched."""
