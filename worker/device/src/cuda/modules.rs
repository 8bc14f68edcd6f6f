//! [`Modules`]: the kernels of a device, translated by its driver.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::CudaContext;
use super::driver::failed;
use crate::error::ComputeError;

/// The kernels by topic: the text that `kernels/make_ptx.py` makes of the source, and their names.
const TOPICS: &[(&str, &[&str])] = &[
    #[cfg(feature = "kernels")]
    (include_str!("kernels/ptx/activation.ptx"), &["activate", "activate_back", "sum_rows"]),
    (include_str!("kernels/ptx/cast.ptx"), &["round_f16", "widen_f16", "round_bf16", "widen_bf16"]),
    (
        include_str!("kernels/ptx/codec.ptx"),
        &[
            "first_non_finite",
            "encode_f16",
            "encode_bf16",
            "encode_int8",
            "encode_one_bit",
            "top_k_histogram",
            "top_k_count",
            "top_k_scan",
            "top_k_write",
        ],
    ),
    #[cfg(feature = "kernels")]
    (
        include_str!("kernels/ptx/elementwise.ptx"),
        &["axpy", "add", "mul", "div", "scale", "fill", "sum_chunks", "sum_sums"],
    ),
    #[cfg(feature = "kernels")]
    (
        include_str!("kernels/ptx/embedding_bag.ptx"),
        &["embedding_bag", "embedding_bag_rows", "embedding_bag_add"],
    ),
    #[cfg(feature = "kernels")]
    (include_str!("kernels/ptx/gemm.ptx"), &["multiply"]),
    #[cfg(feature = "kernels")]
    (
        include_str!("kernels/ptx/loss.ptx"),
        &["softmax_cross_entropy", "sigmoid_cross_entropy", "mean_squared_error"],
    ),
];

/// The kernels of a device.
#[derive(Debug)]
pub(super) struct Modules {
    functions: HashMap<&'static str, sys::CUfunction>,
    modules: Vec<sys::CUmodule>,
    context: Arc<CudaContext>,
}

// SAFETY: The handles are of the driver, which any thread may use once it has bound the context.
unsafe impl Send for Modules {}
// SAFETY: As above.
unsafe impl Sync for Modules {}

impl Modules {
    /// Loads all kernels. The driver translates them, and caches the result for later processes.
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Modules, ComputeError> {
        let functions = HashMap::new();
        let context = context.clone();
        let mut all = Modules { functions, modules: Vec::new(), context };
        all.context.bind()?;
        for &(text, names) in TOPICS {
            let text = CString::new(text).expect("the text of a kernel has no zero byte");
            // SAFETY: The context is bound, and the text ends with a zero byte.
            let module = unsafe { result::module::load_data(text.as_ptr().cast()) };
            let module = module.map_err(failed("cuModuleLoadData"))?;
            all.modules.push(module);
            for name in names {
                let text = CString::new(*name).expect("the name of a kernel has no zero byte");
                // SAFETY: The module is loaded.
                let function = unsafe { result::module::get_function(module, text) };
                all.functions.insert(name, function.map_err(failed("cuModuleGetFunction"))?);
            }
        }
        Ok(all)
    }

    pub(super) fn function(&self, name: &str) -> sys::CUfunction {
        self.functions[name]
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            for module in self.modules.drain(..) {
                // Nobody hears of an error here.
                // SAFETY: The module is loaded in this context. The device has waited for the work
                // that uses it.
                let _ = unsafe { result::module::unload(module) };
            }
        }
    }
}
