"""What the tests stand on: real servers, both faces behind one door, a proxy that breaks connections on purpose."""
