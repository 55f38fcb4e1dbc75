/* Activations rounded to int8 in groups of 32, as prepare.fl writes and linear.fl reads them: [T][K/32] records, and as many groups
 * of XWORDS words. With PAIRS word j holds the 16-bit numbers k = 4j and 4j + 2, word 8 + j those of 4j + 1 and 4j + 3; without,
 * word j holds four signed bytes. */
typedef struct {
    float scale; /* sx: a code stands for code * sx */
    int sum[2];  /* sums of the codes of the first and the last 16 */
    int unused;
} act_group;
#if PAIRS
#define XWORDS 16
#else
#define XWORDS 8
#endif
