//! [`Scalars`]: the named numbers of a step.

/// The named numbers of one step, such as a loss, in the order in which they were first set.
///
/// The session keeps the memory from step to step, so a steady loop allocates nothing here.
#[derive(Clone, Debug, Default)]
pub struct Scalars {
    /// A name of an earlier step has no value until it is set again.
    entries: Vec<(String, Option<f64>)>,
}

impl Scalars {
    /// Sets a number. A later call of the same step replaces an earlier one.
    ///
    /// Cost: a scan of the names.
    pub fn set(&mut self, name: &str, value: f64) {
        match self.entries.iter_mut().find(|(known, _)| known == name) {
            Some((_, entry)) => *entry = Some(value),
            None => self.entries.push((name.to_owned(), Some(value))),
        }
    }

    /// Returns a number; `None` if this step has not set it.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.entries.iter().find(|(known, _)| known == name).and_then(|(_, value)| *value)
    }

    /// Returns all numbers of this step with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&str, f64)> {
        self.entries.iter().filter_map(|(name, value)| Some((&**name, (*value)?)))
    }

    /// Whether this step has no numbers.
    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// Removes all scalars, for the next step.
    pub(crate) fn clear(&mut self) {
        self.entries.iter_mut().for_each(|(_, value)| *value = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_the_numbers_that_it_sets() {
        let mut scalars = Scalars::default();
        assert!(scalars.is_empty());
        scalars.set("loss", 2.0);
        scalars.set("accuracy", 0.5);
        scalars.set("loss", 1.0);
        assert_eq!(scalars.iter().collect::<Vec<_>>(), [("loss", 1.0), ("accuracy", 0.5)]);
        scalars.clear();
        assert!(scalars.is_empty());
        scalars.set("accuracy", 0.75);
        assert_eq!((scalars.get("accuracy"), scalars.get("loss")), (Some(0.75), None));
        assert_eq!(scalars.iter().collect::<Vec<_>>(), [("accuracy", 0.75)]);
    }
}
