//! The C functions of the driver, with the names and arguments of the driver API.
//!
//! No function unwinds into its caller, and none trusts a pointer to be other than null.

mod contexts;
mod copies;
mod devices;
mod errors;
mod events;
mod launches;
mod memory;
mod modules;
mod pointers;
mod streams;

/// Defines functions of the driver.
///
/// `fn` does not wait. `wait` returns a context and the work to wait for, and fails if the context
/// has a fault then. `plain` needs no lock.
macro_rules! driver_functions {
    ($($kind:ident $name:ident($($argument:ident: $of:ty),* $(,)?) $work:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the names are those of the driver API")]
            extern "C" fn $name($($argument: $of),*) -> u32 {
                $crate::driver::abi::driver_functions!(@$kind $name $work)
            }
        )*
    };
    (@fn $name:ident $work:expr) => { $crate::driver::shared::call(stringify!($name), $work) };
    (@wait $name:ident $work:expr) => {
        $crate::driver::shared::call_and_wait(stringify!($name), $work)
    };
    (@plain $name:ident $work:expr) => { $crate::driver::shared::guarded($work) };
}
pub(crate) use driver_functions;
