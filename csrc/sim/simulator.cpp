#include "sim/simulator.h"

namespace ebbtide::sim {

Simulator& simulator() {
  static Simulator* const instance = new Simulator;
  return *instance;
}

}  // namespace ebbtide::sim
