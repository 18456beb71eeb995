// explore list                                 the names of all scenarios
// explore run SCENARIO... [--states N] [--seconds S]
//     a line of JSON for each; the exit code is 1 where one failed
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "scenarios.h"

static std::string quoted(const std::string& text) {
  std::string quoted = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c < ' ' ? ' ' : c;
  }
  return quoted + "\"";
}

int main(int count, char** arguments) {
  std::string command = count > 1 ? arguments[1] : "";
  auto scenarios = check::all_scenarios();
  if (command == "list") {
    for (const auto& scenario : scenarios) std::printf("%s\n", scenario.name.c_str());
    return 0;
  }
  uint64_t max_states = 1'000'000'000;
  double max_s = 1e9;
  std::vector<std::string> names;
  for (int i = 2; i < count; ++i) {
    std::string argument = arguments[i];
    if (argument == "--states") max_states = std::strtoull(arguments[++i], nullptr, 10);
    else if (argument == "--seconds") max_s = std::strtod(arguments[++i], nullptr);
    else names.push_back(argument);
  }
  bool has_failed = false;
  for (const std::string& name : names) {
    const check::Scenario* found = nullptr;
    for (const auto& scenario : scenarios)
      if (scenario.name == name) found = &scenario;
    if (found == nullptr) {
      std::fprintf(stderr, "no scenario is called %s; `list` has their names\n", name.c_str());
      return 2;
    }
    check::Program program = check::prepare(*found);
    double began_s = check::now_s();
    check::Outcome outcome = check::explorer().explore(program, max_states, max_s);
    has_failed |= !outcome.failure.empty();
    std::printf("{\"scenario\": %s, \"executions\": %lu, \"states\": %lu, \"steps\": %lu, \"longest\": %lu, \"deaths\": %lu, "
                "\"is_exhaustive\": %s, \"seconds\": %.2f, \"failure\": %s, \"trace\": [",
                quoted(name).c_str(), outcome.executions, outcome.states, outcome.steps, outcome.longest, outcome.deaths,
                outcome.is_exhaustive ? "true" : "false", check::now_s() - began_s, quoted(outcome.failure).c_str());
    for (size_t i = 0; i < outcome.trace.size(); ++i)
      std::printf("%s%s", i == 0 ? "" : ", ", quoted(outcome.trace[i]).c_str());
    std::printf("]}\n");
    std::fflush(stdout);
  }
  return has_failed ? 1 : 0;
}
