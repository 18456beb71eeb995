// Every place in the program that orders memory can be made relaxed, to see whether the exploration finds it out.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace check {

extern uintptr_t weakened_site;                           // a return address; 0: none
extern std::map<uintptr_t, std::string> ordering_sites;  // those that were reached, and what they are

}  // namespace check
