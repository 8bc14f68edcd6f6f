//! Arguments that are pointers of the caller.
//!
//! Only callers in C construct these types. They keep the promise of the driver API: a pointer is
//! null, or it points to memory of the documented size for the length of the call.

use std::ffi::{CStr, c_char, c_void};

use crate::driver::code::{DriverErrorCode, DriverResult};

/// A pointer to a result.
#[repr(transparent)]
pub(super) struct Out<T>(*mut T);

// Derived, these would ask the same of the result.
impl<T> Clone for Out<T> {
    fn clone(&self) -> Out<T> {
        *self
    }
}

impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes the result. Fails if the pointer is null.
    pub(super) fn set(self, value: T) -> DriverResult {
        self.check()?;
        self.set_if_wanted(value);
        Ok(())
    }

    /// Fails if the pointer is null.
    pub(super) fn check(self) -> DriverResult {
        if self.0.is_null() { Err(DriverErrorCode::INVALID_VALUE) } else { Ok(()) }
    }

    /// Writes the result unless the pointer is null.
    pub(super) fn set_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: the pointer is not null, and the caller lets one value be written.
            unsafe { self.0.write_unaligned(value) }
        }
    }
}

impl Out<u8> {
    /// Writes as many bytes as fit, and a zero.
    pub(super) fn set_text(self, text: &str, length: usize) -> DriverResult {
        self.check()?;
        let count = text.len().min(length.checked_sub(1).ok_or(DriverErrorCode::INVALID_VALUE)?);
        // SAFETY: the pointer is not null, and the caller has room for `length` bytes.
        unsafe {
            self.0.copy_from_nonoverlapping(text.as_ptr(), count);
            self.0.add(count).write(0);
        }
        Ok(())
    }
}

/// A pointer to text that ends with a zero.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct TextPointer(*const c_char);

impl TextPointer {
    pub(super) fn read<'a>(self) -> DriverResult<&'a CStr> {
        if self.0.is_null() {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, and the caller's text ends with a zero.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }

    pub(super) fn name<'a>(self) -> DriverResult<&'a str> {
        self.read()?.to_str().map_err(|_| DriverErrorCode::INVALID_VALUE)
    }
}

/// A pointer to memory of the host that a copy reads or writes, perhaps later.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct HostPointer(*mut c_void);

impl HostPointer {
    pub(super) fn address(self) -> usize {
        self.0 as usize
    }

    /// Copies bytes at the time of the call.
    pub(super) fn bytes(self, size: usize) -> DriverResult<Box<[u8]>> {
        if self.0.is_null() {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, and the caller has `size` bytes there.
        Ok(unsafe { std::slice::from_raw_parts(self.0.cast::<u8>(), size) }.into())
    }
}

/// A pointer to an array of pointers, as launches and options have them.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct Array<T>(*const T);

impl<T: Copy> Array<T> {
    pub(super) fn is_null(self) -> bool {
        self.0.is_null()
    }

    /// Reads an element. Fails if the pointer is null.
    pub(super) fn at(self, index: usize) -> DriverResult<T> {
        if self.0.is_null() {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        // SAFETY: the pointer is not null, and the caller's array has this element.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}
