"""Operations of installed libraries: one file a library, imported when first picked."""
