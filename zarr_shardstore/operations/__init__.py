"""The operations of the abstract store interface, as flows over many arrays."""
