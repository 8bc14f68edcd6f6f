//! The C functions of the driver, with the names and arguments of the driver API.
//!
//! No function unwinds into its caller, and none trusts a pointer to be other than null.

mod contexts;
mod copies;
mod devices;
mod events;
mod launches;
mod lookup;
mod memory;
mod modules;
mod occupancy;
mod pointers;
mod pools;
mod streams;

/// Defines functions of the driver.
///
/// `fn` does not wait. `wait` returns a context and the work to wait for, and fails if the context
/// has a fault then. `plain` needs no lock. Each module gets a table of its functions.
macro_rules! driver_functions {
    ($($kind:ident $name:ident($($argument:ident: $of:ty),* $(,)?) $work:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            #[allow(non_snake_case, reason = "the names are those of the driver API")]
            extern "C" fn $name($($argument: $of),*) -> u32 {
                $crate::driver::abi::driver_functions!(@$kind $name $work)
            }
        )*

        /// Returns the address of a function of this module.
        pub(super) fn address_of(name: &str) -> Option<*const std::ffi::c_void> {
            match name {
                $(stringify!($name) => Some($name as *const std::ffi::c_void),)*
                _ => None,
            }
        }
    };
    (@fn $name:ident $work:expr) => { $crate::driver::shared::call(stringify!($name), $work) };
    (@wait $name:ident $work:expr) => {
        $crate::driver::shared::call_and_wait(stringify!($name), $work)
    };
    (@plain $name:ident $work:expr) => { $crate::driver::shared::guarded($work) };
}
pub(crate) use driver_functions;
