"""The dashboard on the admin port: what runs, what needs the operator, events, a try-it box, and a few actions."""
