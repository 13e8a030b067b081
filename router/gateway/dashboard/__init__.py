"""The pages for people: landing page, dashboard and playground, and the state that they show."""
