//! The committed rows of a table, for tests.

use std::collections::BTreeMap;

use super::Table;
use super::index::{IndexEntry, Pages};
use super::records::id_of;
use crate::commit::Journal;

impl Table {
    /// Returns the committed rows by id, each with its head and slots.
    pub fn contents(&self, journal: &Journal) -> BTreeMap<u64, Vec<u8>> {
        let pages = self.committed_pages(journal);
        let words = (0..self.pages).flat_map(|page| pages.page(page).to_vec());
        let records = words.filter_map(|word| match IndexEntry::of(word) {
            IndexEntry::Row(record) => Some(self.records.read(record)),
            _ => None,
        });
        records.map(|record| (id_of(record), record.to_vec())).collect()
    }
}
