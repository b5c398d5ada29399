#pragma once

#include <optional>
#include <string>

#include "base/settings.h"

// The settings that saver.configure takes, by their place in the core.
namespace ebbtide {

struct Core;

// text: in its plain form (check_setting), or none for what None means. Throws InvalidArgument where None means
// nothing; for the folder of disk backups the StoreError that a backup there would meet.
void configure_setting(Core& core, Setting setting, const std::optional<std::string>& text);

// What the variables say of them.
void read_core_settings(Core& core);

}  // namespace ebbtide
