"""What all packages use: checks of arguments, imports of optional packages, interruptions."""
