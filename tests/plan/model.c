/* model.c - the planner's closed form as a shared object for fit.py, so that there is one model */
#define DT_IMPLEMENTATION
#include "dt_parallel.h"

#define NAME(field, unit, meaning) #field " "
const char *plan_fields(void) { return DT_PLAN_PROFILE(NAME); }

/* Predicts n rows with the same profile, whose numbers are in the order of plan_fields. */
void plan_rows(int n, const dt_plan_model *model, const dt_layout *layout, const double *numbers,
    dt_plan_cost *cost) {
    dt_plan_profile profile = { .name = "fit" };
    memcpy(&profile.peak, numbers, sizeof profile - offsetof(dt_plan_profile, peak));
    for (int i = 0; i < n; i++) (void)dt_plan_estimate(model + i, layout + i, &profile, cost + i);
}
