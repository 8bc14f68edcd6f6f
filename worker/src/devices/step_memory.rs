//! [`StepValues`] and [`StepGradients`]: the memory of one step on the device that computes it.

use std::collections::BTreeSet;
use std::ops::Range;

use pushpull_common::ids::VariableId;
use pushpull_common::tensor::Element;
use pushpull_device::{DeviceElement, View, ViewMut};

use crate::error::ViewError;
use crate::gradients::params::{FirstContent, Gradients, Params, cast_elements};

/// The values of all dense variables where a device computes: the pulled values themselves on the
/// processor, otherwise a copy of them.
#[derive(Clone, Copy, Debug)]
pub struct StepValues<'a> {
    params: &'a Params,
    /// The bytes of the copy, laid out as those of the values.
    copy: Option<View<'a, u8>>,
}

impl<'a> StepValues<'a> {
    pub(crate) fn new(params: &'a Params, copy: Option<View<'a, u8>>) -> StepValues<'a> {
        StepValues { params, copy }
    }

    /// The values in the processor's memory.
    pub fn host(&self) -> &'a Params {
        self.params
    }

    /// Returns the elements of a variable, in row-major order. Costs a look-up by name, no copy.
    ///
    /// # Errors
    /// [`ViewError::Unknown`], [`ViewError::Type`] or [`ViewError::Sparse`].
    pub fn view<T: Element + DeviceElement>(&self, name: &str) -> Result<View<'a, T>, ViewError> {
        match self.copy {
            None => self.params.view(name).map(View::from),
            Some(copy) => {
                let range = self.params.plan.locate::<T>(name)?.1;
                Ok(copy.slice(range).cast())
            }
        }
    }

    /// Returns the elements of several variables of one type. Errors as for [`StepValues::view`].
    pub fn views<T: Element + DeviceElement>(
        &self,
        names: &[&str],
    ) -> Result<Vec<View<'a, T>>, ViewError> {
        names.iter().map(|name| self.view(name)).collect()
    }
}

/// The processor's memory.
impl<'a> From<&'a Params> for StepValues<'a> {
    fn from(params: &'a Params) -> StepValues<'a> {
        StepValues::new(params, None)
    }
}

/// The gradients of a step where a device computes: those of the push themselves on the processor,
/// otherwise memory of the device that is copied to them.
#[derive(Debug)]
pub struct StepGradients<'a> {
    gradients: &'a mut Gradients,
    /// The memory of the device, laid out as that of the gradients and zeroed for this step, and
    /// the variables that were viewed there.
    copy: Option<(ViewMut<'a, u8>, &'a mut BTreeSet<VariableId>)>,
}

impl<'a> StepGradients<'a> {
    pub(crate) fn new(
        gradients: &'a mut Gradients,
        copy: Option<(ViewMut<'a, u8>, &'a mut BTreeSet<VariableId>)>,
    ) -> StepGradients<'a> {
        StepGradients { gradients, copy }
    }

    /// The gradients in the processor's memory. Sparse variables and those that the processor
    /// computes are set here, in addition to those that are viewed on the device.
    pub fn host_mut(&mut self) -> &mut Gradients {
        self.gradients
    }

    /// Returns the gradients of several variables of one type, and adds them to the push. They are
    /// zero at first.
    ///
    /// # Errors
    /// Those of [`Gradients::views_mut`].
    pub fn views_mut<T: Element + DeviceElement>(
        &mut self,
        names: &[&str],
    ) -> Result<Vec<ViewMut<'_, T>>, ViewError> {
        if self.copy.is_none() {
            let views = self.gradients.views_mut_of::<T>(names, FirstContent::Zeros)?;
            return Ok(views.into_iter().map(ViewMut::from).collect());
        }
        // The gradients of the device are copied over these.
        self.gradients.views_mut_of::<T>(names, FirstContent::Arbitrary)?;
        let places: Result<Vec<_>, _> =
            names.iter().map(|name| self.gradients.plan.locate::<T>(name)).collect();
        let places = places?;
        if let Some((_, viewed)) = &mut self.copy {
            viewed.extend(places.iter().map(|(id, _)| *id));
        }
        let ranges: Vec<Range<usize>> = places.into_iter().map(|(_, range)| range).collect();
        let copy = self.copy.as_mut().map(|(copy, _)| copy.reborrow());
        let views = copy.map(|copy| split(copy, &ranges)).unwrap_or_default();
        Ok(views.into_iter().map(ViewMut::cast).collect())
    }
}

/// The processor's memory.
impl<'a> From<&'a mut Gradients> for StepGradients<'a> {
    fn from(gradients: &'a mut Gradients) -> StepGradients<'a> {
        StepGradients::new(gradients, None)
    }
}

impl Gradients {
    /// Returns the gradients of a list of variables, as [`Gradients::views_mut`] or
    /// [`Gradients::views_mut_unfilled`] does.
    fn views_mut_of<T: Element>(
        &mut self,
        names: &[&str],
        first: FirstContent,
    ) -> Result<Vec<&mut [T]>, ViewError> {
        let mut views: Vec<&mut [u8]> = names.iter().map(|_| &mut [][..]).collect();
        self.view_all::<T>(names, first, &mut views)?;
        Ok(views.into_iter().map(cast_elements).collect())
    }
}

/// Cuts a view into ranges that do not overlap, in any order.
fn split<'a>(view: ViewMut<'a, u8>, ranges: &[Range<usize>]) -> Vec<ViewMut<'a, u8>> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_unstable_by_key(|&index| (ranges[index].start, ranges[index].end));
    let mut views: Vec<ViewMut<'a, u8>> = ranges.iter().map(|_| ViewMut::from(&mut [])).collect();
    let mut rest = view;
    let mut at = 0;
    for index in order {
        let range = &ranges[index];
        let (_, from) = rest.split_at(range.start - at);
        (views[index], rest) = from.split_at(range.len());
        at = range.end;
    }
    views
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_in_any_order_are_cut() {
        let mut bytes: Vec<u8> = (0..12).collect();
        let ranges = [6..8, 0..3, 3..3, 8..12, 3..4];
        let views = split(ViewMut::from(&mut bytes), &ranges);
        let found: Vec<Vec<u8>> =
            views.into_iter().map(|view| view.into_host().unwrap().to_vec()).collect();
        assert_eq!(found, [vec![6, 7], vec![0, 1, 2], vec![], vec![8, 9, 10, 11], vec![3]]);
    }
}
