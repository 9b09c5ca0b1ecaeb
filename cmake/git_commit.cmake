# Run by every build of the command line: writes HEADER, which defines CHIASMA_GIT_COMMIT, and touches it only when the
# commit has changed, so that a new commit recompiles one file. "-dirty" marks uncommitted changes.
cmake_minimum_required(VERSION 3.25)
execute_process(COMMAND git describe --always --dirty --abbrev=40 --exclude=*
  WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE commit RESULT_VARIABLE failed
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(failed OR NOT commit)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "#define CHIASMA_GIT_COMMIT \"@commit@\"\n" @ONLY)
