/* checkpoint.h - sums over the numbers of tests/golden/checkpoint, and the loss of its next step */
#define GOLDEN_MODEL 387.31491994857788
#define GOLDEN_OPTIM 1121.854338826002
#define GOLDEN_LOSS 5.4647220297463921
