/* client WAY ACTION [WORDS] */
#include "api.h"

int main(int count, char** words) {
  struct api api;
  if (count < 3 || resolve(words[1], &api) != 0) return 1;
  return run_action(&api, count - 2, words + 2);
}
