/* A client as a library, which host.c opens. */
#include "api.h"

int run_client(int count, char** words);

int run_client(int count, char** words) {
  struct api api;
  if (count < 2 || resolve(words[0], &api) != 0) return 1;
  return run_action(&api, count - 1, words + 1);
}
