"""Operations served by installed libraries, one file a library, imported when one of its operations is picked."""
