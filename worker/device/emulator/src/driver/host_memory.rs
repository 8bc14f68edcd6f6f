//! [`PageLockedMemory`]: the page-locked memory of the host.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;

use super::code::{DriverErrorCode, DriverResult};

/// The page-locked memory of the host.
#[derive(Debug, Default)]
pub(crate) struct PageLockedMemory {
    ranges: BTreeMap<usize, PageLockedRange>,
}

#[derive(Clone, Copy, Debug)]
struct PageLockedRange {
    size: usize,
    /// The layout of the driver's allocation; `None` if the host allocated the range.
    layout: Option<Layout>,
}

impl PageLockedMemory {
    /// Allocates page-locked memory that holds NaN.
    pub(crate) fn allocate(&mut self, size: usize) -> DriverResult<*mut u8> {
        if size == 0 {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        let layout =
            Layout::from_size_align(size, PAGE).map_err(|_| DriverErrorCode::OUT_OF_MEMORY)?;
        // SAFETY: the size is not zero.
        let at = unsafe { alloc(layout) };
        if at.is_null() {
            return Err(DriverErrorCode::OUT_OF_MEMORY);
        }
        // SAFETY: `alloc` has returned this many bytes.
        unsafe { at.write_bytes(0xff, size) };
        self.ranges.insert(at as usize, PageLockedRange { size, layout: Some(layout) });
        Ok(at)
    }

    /// The size of memory that was allocated here.
    pub(crate) fn allocated(&self, at: usize) -> DriverResult<usize> {
        let pinned = self.ranges.get(&at).filter(|pinned| pinned.layout.is_some());
        pinned.map(|pinned| pinned.size).ok_or(DriverErrorCode::INVALID_VALUE)
    }

    /// Frees memory that was allocated here.
    pub(crate) fn free(&mut self, at: usize) -> DriverResult {
        self.allocated(at)?;
        if let Some(PageLockedRange { layout: Some(layout), .. }) = self.ranges.remove(&at) {
            // SAFETY: `allocate` has returned this address with this layout, and it is not freed
            // twice, for it is no longer in the table.
            unsafe { dealloc(at as *mut u8, layout) };
        }
        Ok(())
    }

    /// Page-locks memory of the host.
    pub(crate) fn register(&mut self, at: usize, size: usize) -> DriverResult {
        let end = at.checked_add(size).ok_or(DriverErrorCode::INVALID_VALUE)?;
        if at == 0 || size == 0 {
            return Err(DriverErrorCode::INVALID_VALUE);
        }
        let before = self.ranges.range(..end).next_back();
        if before.is_some_and(|(&start, pinned)| start + pinned.size > at) {
            return Err(DriverErrorCode::ALREADY_REGISTERED);
        }
        self.ranges.insert(at, PageLockedRange { size, layout: None });
        Ok(())
    }

    /// The size of memory that was registered.
    pub(crate) fn registered(&self, at: usize) -> DriverResult<usize> {
        let pinned = self.ranges.get(&at).filter(|pinned| pinned.layout.is_none());
        pinned.map(|pinned| pinned.size).ok_or(DriverErrorCode::NOT_REGISTERED)
    }

    /// Takes a registration back.
    pub(crate) fn unregister(&mut self, at: usize) -> DriverResult {
        self.registered(at)?;
        self.ranges.remove(&at);
        Ok(())
    }

    /// Whether all bytes of a range are page-locked.
    pub(crate) fn is_pinned(&self, at: usize, size: usize) -> bool {
        let range = self.ranges.range(..=at).next_back();
        range.is_some_and(|(&start, pinned)| at - start + size <= pinned.size)
    }

    /// Returns the number of ranges that the driver allocated, and of those that the host
    /// registered.
    pub(crate) fn counts(&self) -> (u64, u64) {
        let allocated = self.ranges.values().filter(|pinned| pinned.layout.is_some()).count();
        (allocated as u64, (self.ranges.len() - allocated) as u64)
    }
}

const PAGE: usize = 4096;
