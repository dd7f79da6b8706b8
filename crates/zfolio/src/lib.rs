//! zfolio
