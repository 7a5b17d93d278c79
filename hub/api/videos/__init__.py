"""/v1/videos: videos as jobs, in the shapes of OpenAI's clients."""
