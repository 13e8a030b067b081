"""The devices that workers compute on, and the settings whose defaults depend on them."""
