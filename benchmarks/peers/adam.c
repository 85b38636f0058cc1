/* Adam as ai.onnx.preview.training defines it, in one pass over memory. */

#include <math.h>
#include <stdint.h>

/* rate: the learning rate with the bias correction of the step; count: elements of each array. */
void adam(float *restrict x, const float *restrict g, float *restrict v, float *restrict h,
          int64_t count, float rate, float alpha, float beta, float epsilon)
{
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < count; i++) {
        v[i] = alpha * v[i] + (1 - alpha) * g[i];
        h[i] = beta * h[i] + (1 - beta) * g[i] * g[i];
        x[i] -= rate * v[i] / (sqrtf(h[i]) + epsilon);
    }
}
