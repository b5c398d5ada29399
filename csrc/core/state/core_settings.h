#pragma once

#include <optional>
#include <string>

#include "base/settings.h"

// The settings that saver.configure takes, by their place in the core.
namespace ebbtide {

struct Core;

// text: in its plain form (check_setting), or none for None. Throws InvalidArgument where None has no meaning, and for
// the folder of disk backups the StoreError that a backup there would throw.
void configure_setting(Core& core, Setting setting, const std::optional<std::string>& text);

// The value in force, in its plain form: "" for None. Throws InvalidArgument for a setting of other parts.
std::string show_setting(Core& core, Setting setting);

// Applies the environment variables of these settings.
void read_core_settings(Core& core);

}  // namespace ebbtide
