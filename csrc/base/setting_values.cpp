#include <charconv>
#include <string>

#include "base/bytes.h"
#include "base/error.h"
#include "base/settings.h"
#include "base/tag.h"
#include "base/text.h"

// The form of a value of each kind, and the error for a malformed one.
namespace ebbtide {
namespace {

constexpr size_t kLongestNumber = 64;

[[noreturn]] void refuse(std::string_view label, const std::string& rest) {
  throw InvalidArgument(std::string(label) + rest);
}

// The words of a list like "split|whole", one after the other; word is empty at the end.
std::string_view next_word(std::string_view& list) {
  const size_t end = std::min(list.find('|'), list.size());
  const std::string_view word = list.substr(0, end);
  list.remove_prefix(std::min(end + 1, list.size()));
  return word;
}

char in_lower_case(char letter) { return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter + 32) : letter; }

bool is_word(std::string_view text, std::string_view word) noexcept {
  if (text.size() != word.size()) return false;
  for (size_t at = 0; at < word.size(); ++at) {
    if (in_lower_case(text[at]) != word[at]) return false;
  }
  return true;
}

int find_word(std::string_view list, std::string_view text, std::string_view* found = nullptr) noexcept {
  text = trim_spaces(text);
  for (int index = 0; !list.empty(); ++index) {
    const std::string_view word = next_word(list);
    if (!is_word(text, word)) continue;
    if (found != nullptr) *found = word;
    return index;
  }
  return -1;
}

std::string check_word(const SettingFacts& facts, std::string_view text, std::string_view label) {
  std::string_view word;
  if (find_word(facts.values, text, &word) >= 0) return std::string(word);
  if (facts.kind == SettingKind::kSwitch) refuse(label, " must be 0 or 1, not " + in_quotes(text));
  std::string words;
  for (std::string_view rest = facts.values; !rest.empty();) {
    words += (words.empty() ? "" : ", ") + std::string(next_word(rest));
  }
  refuse(label, " must be one of " + words + ", not " + in_quotes(text));
}

std::string check_size(const SettingFacts& facts, std::string_view text, std::string_view label) {
  if (find_word(facts.values, "auto") >= 0 && text == "auto") return std::string(text);
  const ParsedSize size = parse_size(text.size() <= kLongestNumber ? text : std::string_view());
  switch (size.problem) {
    case SizeProblem::kForm: refuse(label, " must be a size like \"16GiB\" or \"512MiB\", not " + in_quotes(text));
    case SizeProblem::kNegative: refuse(label, " must not be negative: " + in_quotes(text));
    case SizeProblem::kTooLarge: refuse(label, " is beyond any memory: " + in_quotes(text));
    case SizeProblem::kUnit: {
      const std::string number(size.number);
      const std::string unit(size.unit);
      const bool is_ambiguous = find_word("k|m|g|t", unit) >= 0;
      const std::string capital(1, unit.empty() ? ' ' : static_cast<char>(unit[0] & ~0x20));
      refuse(label, " has the unknown unit " + in_quotes(unit) + " (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB)" +
                        (is_ambiguous ? "; write " + number + capital + "iB or " + number + capital + "B" : ""));
    }
    case SizeProblem::kNone: break;
  }
  if (size.unit.empty() && size.number.find('.') != std::string_view::npos)
    refuse(label, " has no unit: write " + std::string(size.number) + "GiB, or whole bytes");
  if (size.bytes == 0 && find_word(facts.values, "1") >= 0) refuse(label, " must be more than 0 bytes");
  return std::to_string(size.bytes);
}

std::string check_count(const SettingFacts& facts, std::string_view text, std::string_view label) {
  std::string_view range = facts.values;
  const std::string least(next_word(range));
  const std::string most(range);
  const std::string_view digits = trim_spaces(text);
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  const bool is_number = error == std::errc() && end == digits.data() + digits.size();
  if (!is_number || value < std::stoull(least) || value > std::stoull(most)) {
    refuse(label, " must be a whole number from " + least + " to " + most + ", not " + in_quotes(text));
  }
  return std::to_string(value);
}

std::string check_path(std::string_view text, std::string_view label) {
  if (text.empty()) refuse(label, " must be a path, and not empty");
  if (text.find('\0') != std::string_view::npos) refuse(label, " must be a path, which has no NUL: " + in_quotes(text));
  return std::string(text);
}

}  // namespace

int word_index(Setting setting) noexcept {
  const char* text = variable_text(setting);
  return text == nullptr ? -1 : find_word(facts_of(setting).values, text);
}

std::string check_setting(const SettingFacts& facts, std::string_view text, std::string_view label) {
  switch (facts.kind) {
    case SettingKind::kSize: return check_size(facts, text, label);
    case SettingKind::kSwitch:
    case SettingKind::kChoice: return check_word(facts, text, label);
    case SettingKind::kCount: return check_count(facts, text, label);
    case SettingKind::kTag:
      try {
        check_tag_name(text);
        return std::string(text);
      } catch (const InvalidArgument& error) {
        refuse(label, std::string(": ") + error.what());
      }
    case SettingKind::kFolder:
    case SettingKind::kFile: return check_path(text, label);
  }
  refuse(label, " is of no known kind");
}

}  // namespace ebbtide
